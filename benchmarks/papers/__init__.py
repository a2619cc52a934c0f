"""``outrider paper``: the experiments of five papers, with Outrider's own engine: ``run`` goes through a paper's rows."""
