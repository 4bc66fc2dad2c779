"""What runs on a Ray cluster. Ray is an optional extra and only imported when it is asked for."""
