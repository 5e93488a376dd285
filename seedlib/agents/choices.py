"""The names that settings may have; apart from what they name, so that checking needs no JAX."""

TORSOS = ("mlp", "shallow", "deep")
"""The torsos that `networks.make_torso` knows."""

COMPUTE_DTYPES = ("float32", "bfloat16")
"""The dtypes that activations may have; parameters, outputs and recurrent states are float32."""
