"""Checks of the target: the same bits whatever shares a pass, the answers of its own code, the cost of a pass. In service,
one answer in a thousand is decoded a second time.
"""
