"""Keys and values of all live requests, in tiles of one pool."""
