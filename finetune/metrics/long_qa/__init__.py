"""EM and F1 for question answering: the `evaluate` module and the scores it is made of."""
