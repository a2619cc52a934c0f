"""Where users reach a router: the public servers, the ops listener, and who shares their ports."""
