"""The decoding loop: admission, drafts, forward passes, verification, delivery."""
