"""Tests of hf_wlb: unit (no torch), numerics (one process), distributed (gloo), gpu."""
