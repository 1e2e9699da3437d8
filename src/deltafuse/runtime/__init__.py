"""What the package asks of the machine it runs on."""
