from gnomon.deferred import defer

# Only modules of mlx-lm are used here; its package imports transformers, which takes a second or two.
defer("mlx_lm")
