"""seedlib: components for scalable deep reinforcement learning with central inference.

Importing this package is cheap: it brings no JAX, no TensorFlow and no Reverb. Import the room you
need, for example `seedlib.components.batcher` or `seedlib.agents.vtrace`.
"""

__version__ = "0.1.0"
