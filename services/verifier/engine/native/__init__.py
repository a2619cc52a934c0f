"""What a step decides for all requests at once, in C. The Python forms are the references, and the fallback."""
