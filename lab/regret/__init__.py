"""How much slower ``auto`` is than the best fixed strategy of each answer: recorded answers on simulated machines."""
