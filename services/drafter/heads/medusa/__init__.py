"""Medusa's heads (Cai et al., 2401.10774)."""
