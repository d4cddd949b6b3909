"""Where users are: trainers that the monitor is attached to, and places that its decisions are sent to."""
