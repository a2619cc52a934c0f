"""Components outside of Ray: a drafter, verifiers, and the links to them."""
