"""Plain modules: no model here knows a training method."""
