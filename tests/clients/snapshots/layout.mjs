// Cuts documents with the Node client's `fragments.js`.
//
// argv: the client's folder. stdin: one JSON line {document, sizes, max_bytes} each; stdout: one JSON line {text, parts}
// each, the text in base64 and a part as [start, end, glue].

import { createInterface } from "node:readline";

const { encode, split } = await import(`${process.argv[2]}/fragments.js`);

for await (const line of createInterface({ input: process.stdin })) {
  const { document, sizes, max_bytes } = JSON.parse(line);
  const text = encode(document, sizes.least, max_bytes);
  const parts = split(text, sizes).map(({ start, end, glue }) => [start, end, glue]);
  process.stdout.write(`${JSON.stringify({ text: text.data.toString("base64"), parts })}\n`);
}
