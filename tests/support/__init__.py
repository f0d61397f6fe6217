"""What tests share: the spawn helper and, beside it, oracles and tolerances."""
