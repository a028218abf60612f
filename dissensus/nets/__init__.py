"""Network surgery: a network's operations read, cut, and its layers changed; kinds of ensembles are made with it."""
