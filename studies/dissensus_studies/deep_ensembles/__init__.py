"""Studies of deep ensembles: two small problems of a practical, and the usual regression benchmark."""
