"""Reading, completing and checking configs."""
