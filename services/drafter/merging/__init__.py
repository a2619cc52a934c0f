"""How the drafts of all sources become one tree: what a proposal is worth, and the most probable nodes of all of them."""
