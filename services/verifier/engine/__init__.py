"""The decoding loop: admission, passes, drafts that wait, delivery."""
