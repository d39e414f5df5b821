"""Studies of pretrained models whose attention became Harmonic layers."""
