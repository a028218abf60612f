"""Studies of joint training and learner collusion: theory, tables, images."""
