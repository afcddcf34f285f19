"""Commands of ``slideformer`` that look at a machine or a model and train nothing."""
