"""What a step costs the host beside the target's arithmetic: the real loop and drafters on a target that takes no time."""
