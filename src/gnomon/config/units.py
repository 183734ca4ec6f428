"""Units of sizes, in bytes."""

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30
GB = 10**9
