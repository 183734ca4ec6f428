"""Models on disk and how they get there: the starter's package, the hub, the registry, clean-up. Loads no mlx."""
