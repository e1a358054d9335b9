from ray_jobs.train_on_ray import interface_of


def test_the_loopback_and_an_address_of_nobody() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") is None  # TEST-NET-3, which nobody has
