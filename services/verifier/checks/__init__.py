"""Whether the target is what it should be: the same bits whatever shares a pass, the answers of its own code, the cost of a
pass; and in service one answer in a thousand, decoded a second time.
"""
