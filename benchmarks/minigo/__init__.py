"""MiniGo: reinforcement learning of Go by self-play with tree search."""
