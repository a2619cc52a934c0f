"""Hot paths of text drafters in C. The Python forms are the references, and take over where there is no compiler."""
