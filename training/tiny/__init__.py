"""A small untrained policy to start from, its autoencoder fitted to recordings (`dzrobot init`)."""
