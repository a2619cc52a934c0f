"""What other strategies would have made of an answer: replays it with their drafts, beside the decoding."""
