"""Components outside of Ray: a drafter, verifiers, the links to them, and a router in front of such verifiers."""
