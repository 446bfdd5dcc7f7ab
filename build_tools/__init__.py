"""What setup.py and pip need to know before anything is compiled. Imports nothing that pip may not have."""
