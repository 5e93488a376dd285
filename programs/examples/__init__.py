"""Short complete files to copy from: an environment, a network and a loss of one's own."""
