"""Rules by which the router chooses how a request is drafted: what they may ask (``facts``, ``conditions``), what they set
(``rule``), how they are read (``reading``), which one counts (``first_match``), and how a file of them is followed
(``rule_book``)."""
