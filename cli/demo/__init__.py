"""``make demo``: what Outrider is for, in a minute: an answer written twice, drafts that lie, a verifier that is killed."""
