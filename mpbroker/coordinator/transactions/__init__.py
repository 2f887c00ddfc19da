"""Transactional ids, their states, and the markers that end transactions."""
