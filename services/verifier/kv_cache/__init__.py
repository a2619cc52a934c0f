"""The KV cache: keys and values of all live requests, in the blocks of one pool."""
