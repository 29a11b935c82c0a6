"""Twenty short texts of different kinds for tests that need realistic tokens."""

TEXTS = (
    "The lighthouse keeper climbed the stairs every evening at six, a can of oil in one hand and "
    "the other on the cold rail. From the gallery he could see the whole bay: the fishing boats "
    "coming home, the long white line of the reef, and beyond it the dark water.",
    "def binary_search(items, wanted):\n    low, high = 0, len(items)\n    while low < high:\n"
    "        middle = (low + high) // 2\n        if items[middle] < wanted:\n"
    "            low = middle + 1\n        else:\n            high = middle\n    return low\n",
    "A cache is a small, fast memory that holds copies of data kept elsewhere. It helps only when "
    "the same data are asked for again before they are thrown out, and it is right only when a "
    "copy is never mistaken for something newer than it is.",
    "Question: A train leaves at 14:35 and arrives at 17:10. How long is the journey?\n"
    "Answer: From 14:35 to 17:10 there are 2 hours and 35 minutes, that is 155 minutes.",
    "Ingredients: 500 g of flour, 325 ml of water, 10 g of salt, 3 g of yeast. Mix everything, let "
    "the dough rest for half an hour, fold it four times, and leave it overnight in the cold. "
    "Bake at 240 degrees for forty minutes, the first twenty with the lid on.",
    "SELECT customer, SUM(amount) AS total FROM orders WHERE placed >= '2024-01-01' GROUP BY "
    "customer HAVING SUM(amount) > 1000 ORDER BY total DESC LIMIT 10;",
    "Water boils when its vapour pressure equals the pressure around it. On a mountain the air is "
    "thinner, so the water boils at a lower temperature and eggs take longer to cook.",
    "Dear Ms. Okafor,\n\nThank you for your letter of 3 March. We have looked into the matter and "
    "found that the parcel was delivered to the wrong floor. We are sorry for the trouble and "
    "will send a replacement today.\n\nYours sincerely,\nThe service desk",
    "#include <stdio.h>\n\nint main(void) {\n  for (int i = 1; i <= 100; ++i) {\n"
    '    if (i % 15 == 0) puts("FizzBuzz");\n    else if (i % 5 == 0) puts("Buzz");\n'
    '    else if (i % 3 == 0) puts("Fizz");\n    else printf("%d\\n", i);\n  }\n  return 0;\n}\n',
    "The old map showed a river where now there is a road. Nobody in the village remembered the "
    "water, but in wet winters the cellars on the east side still filled, as if the river had "
    "only been asked to wait.",
    "In a market with many sellers, no single one can set the price. If one asks more, buyers go "
    "elsewhere; if one asks less, there is soon nothing left to sell. The price that remains is "
    "the one at which the amount offered equals the amount wanted.",
    '{"name": "sensor-17", "location": {"lat": 47.37, "lon": 8.54}, "readings": [21.5, 21.7, 22.0, '
    '21.9], "unit": "celsius", "ok": true, "note": null}',
    "Once there was a fox who wanted to learn to read. She asked the owl, who said it would take a "
    "year. She asked the hare, who said it could be done in a day. A year later the fox was still "
    "asking, and the mouse who had sat beside the owl was reading to her children.",
    "Les feuilles tombent en octobre et le vent les pousse vers le canal. Un enfant les compte, "
    "puis recommence, parce qu'il en tombe toujours de nouvelles.",
    "Der Zug hat zehn Minuten Verspätung. Auf dem Bahnsteig steht eine Frau mit einem Cello und "
    "übt leise, ohne Bogen, nur mit den Fingern der linken Hand.",
    "Abstract. We study how the time to the first token depends on the length of the prompt. With "
    "the same hardware, doubling the prompt more than doubles the time, since attention grows "
    "with the square of the length. Splitting the work into chunks keeps other requests moving.",
    "To reset the device, hold the power button for ten seconds until the light turns red. Release "
    "it, wait for three short beeps, and press it again once. All settings except the network "
    "name will be lost.",
    "The committee met on Tuesday. Present: Adams, Brandt, Cruz, Dubois. The minutes of the last "
    "meeting were accepted without changes. Item 1: the roof. Cruz reported that two offers had "
    "come in and a third was expected. Item 2: the budget. Decision postponed.",
    "Mitochondria carry their own small circle of DNA, a memory of the time when their ancestors "
    "lived alone. They divide on their own schedule, and in most animals they come from the "
    "mother only.",
    "1 2 3 5 8 13 21 34 55 89 144 233 377 610 987. Each number is the sum of the two before it. "
    "The ratio of neighbours comes closer and closer to 1.6180339887, which is (1 + sqrt(5)) / 2.",
)
