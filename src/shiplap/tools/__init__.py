"""What looks at layers and runs from outside. Tools do not know of each other, and the library never imports them."""
