"""Short complete files to copy from: an environment, a network, a loss and a node of one's own."""
