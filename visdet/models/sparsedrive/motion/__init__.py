"""The motion of agents and the plan of the ego vehicle."""
