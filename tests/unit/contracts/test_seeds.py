from onbeat.contracts.seeds import seed_of


def test_seeds_differ_by_place_and_fit_31_bits() -> None:
    places = [(0, t, i) for t in range(50) for i in range(8)] + [(2**63, 15, 1023), (0, "evaluation", 3)]
    seeds = [seed_of(*place) for place in places]
    assert len(set(seeds)) == len(places)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert seed_of(0, 1, 23) != seed_of(0, 12, 3)
    assert [seed_of(*place) for place in places] == seeds
