"""Other transfer engines, each run by an interpreter of its own: two copies of UCX in one process do not mix."""
