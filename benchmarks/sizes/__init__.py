"""``outrider bench sizes``: from which size of the target on does each drafter pay on this machine?"""
