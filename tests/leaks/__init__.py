"""Memory of the extension module: every public function is called many times."""
