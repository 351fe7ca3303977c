"""What the tests share: what a machine must offer, the leak check, and the state of long runs."""
