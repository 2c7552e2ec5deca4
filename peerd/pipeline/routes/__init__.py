"""A trainer's choice of stage peers, and the stage peers' checks of what arrives."""
