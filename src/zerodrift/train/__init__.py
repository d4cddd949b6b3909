"""Online RL on one machine: rollouts, updates in flight, and a learner whose numbers are the engine's, bit for bit."""
