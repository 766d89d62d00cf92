"""Views for people: fed frozen values, cannot change what the engine does."""
