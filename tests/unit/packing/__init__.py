"""Tests of hf_wlb.packing: no torch."""
